"""megatron-fsdp under mixle: what it does with gradients, measured, and the refusals that follow from it."""
