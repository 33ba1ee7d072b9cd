"""One small tracker each: TensorBoard, Weights & Biases, MLflow, trackio.

`headwise.tracking.find` loads one by its name. Each is made with its destination and called with a
`headwise.tracking.TrackedRun`; it answers False where it has that run already.
"""
