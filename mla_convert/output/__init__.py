"""Every file of a result: tensors, config, model card, record, code; staged and renamed into place."""
