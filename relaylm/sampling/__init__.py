"""From a schedule and a plan to samples: queue, engine, the event loop, decoding rules, MDLM's reference sampler."""
