"""What wins quality back: `heal`, layer by layer, and `finetune`, distillation of the whole model."""
