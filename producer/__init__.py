"""What is measured, and the measuring."""
