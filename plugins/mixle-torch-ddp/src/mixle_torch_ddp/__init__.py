"""torch's DistributedDataParallel as the owner of data-parallel gradients."""
