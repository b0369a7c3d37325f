"""Layout of dense Qwen3 models from transformers, and builders by size."""
