"""Leave-one-out predictions of Gaussian posteriors without refitting, and tuning by them."""

from laplace_plus.evidence import GAUSSIAN_TUNERS
from laplace_plus.leave_one_out.auto import Auto, AutoTuning
from laplace_plus.leave_one_out.predictions import LeaveOneOutPredictions
from laplace_plus.leave_one_out.tuning import LeaveOneOut, LeaveOneOutTuning

GAUSSIAN_TUNERS.update(leave_one_out=LeaveOneOut, auto=Auto)

__all__ = ["Auto", "AutoTuning", "LeaveOneOut", "LeaveOneOutPredictions", "LeaveOneOutTuning"]
