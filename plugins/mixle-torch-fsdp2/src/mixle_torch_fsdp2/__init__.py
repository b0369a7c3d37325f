"""torch's fully_shard (FSDP2, HSDP) as the owner of data-parallel gradients."""
