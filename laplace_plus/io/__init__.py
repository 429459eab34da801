"""What is left until no method asks for checkpoints of its own."""
