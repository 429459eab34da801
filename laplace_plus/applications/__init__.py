"""What a posterior is for: calibration, conformal sets, mixtures, uses, constraints, training, serving, pictures."""
