"""Subnetwork inference: a posterior over chosen weights, all others fixed."""
