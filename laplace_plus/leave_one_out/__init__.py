"""Leave-one-out predictions of Gaussian posteriors without refitting, and tuning by them."""

from laplace_plus.leave_one_out.predictions import LeaveOneOut
from laplace_plus.leave_one_out.tuning import LeaveOneOutTuning, tune_leave_one_out

__all__ = ["LeaveOneOut", "LeaveOneOutTuning", "tune_leave_one_out"]
