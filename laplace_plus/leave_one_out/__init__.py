"""Leave-one-out predictions of Gaussian posteriors without refitting, and tuning by them."""

from laplace_plus.leave_one_out.predictions import LeaveOneOutPredictions
from laplace_plus.leave_one_out.tuning import LeaveOneOut, LeaveOneOutTuning

__all__ = ["LeaveOneOut", "LeaveOneOutPredictions", "LeaveOneOutTuning"]
