"""What a checkpoint's attention uses: its tensors read lazily, its heads measured, beside a random
control."""
