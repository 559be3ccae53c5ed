"""The idea: schedules, the diffusion process, plans, spacing and cost. Values and mathematics, no files, no devices."""
