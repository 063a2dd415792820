"""Tasks, models and the training loop that compare recipes. So far: the bundled text and the demo."""
