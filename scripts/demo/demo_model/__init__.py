"""What the bundled demo model is trained on and how it is evaluated."""
