"""Speed against MDLM's own sampler."""
