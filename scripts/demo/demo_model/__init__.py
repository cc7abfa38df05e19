"""The training data and the evaluation of the bundled demo model."""
