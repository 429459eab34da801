"""A variational posterior over a network's last layer, on features that stay as they are."""
