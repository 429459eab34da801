"""Leave-one-out predictions of Gaussian posteriors without refitting, and tuning by them."""

from laplace_plus.evidence import GAUSSIAN_TUNERS
from laplace_plus.leave_one_out.predictions import LeaveOneOutPredictions
from laplace_plus.leave_one_out.tuning import LeaveOneOut, LeaveOneOutTuning

GAUSSIAN_TUNERS["leave_one_out"] = LeaveOneOut

__all__ = ["LeaveOneOut", "LeaveOneOutPredictions", "LeaveOneOutTuning"]
