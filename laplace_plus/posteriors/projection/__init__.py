"""What NullSpace and VIKING share: the rows whose null space is sought, and noise projected onto it."""
