"""Log lines of CANN's SilentCheckV2 operator, from the documentation of MindSpore's feature value detection.

Four ranks, a fault on rank 2 in step 5. Each line without what comes before the operator's own text.
"""

from __future__ import annotations

_DEFAULTS = (
    "c_min_steps = [100], c_thresh_l1 = [1000000.000000], c_coeff_l1 = [100000.000000], "
    "c_thresh_l2 = [10000.000000], c_coeff_l2 = [5000.000000]"
)
_ERROR = "SilentCheck get L1 Error, input message: "

# Mode 1: rank 0, the steps after the fault.
MODE_1 = [
    _ERROR + values + ",         " + _DEFAULTS + " npu_asd_detect = [1]."
    for values in (
        "val = [nan], pre_val = [0.100089], min_val = [0.089474], max_val = [0.130423], step = [6]",
        "val = [nan], pre_val = [0.026273], min_val = [0.026273], max_val = [0.026949], step = [6]",
        "val = [nan], pre_val = [0.005759], min_val = [0.005759], max_val = [0.005931], step = [6]",
        "val = [nan], pre_val = [0.004188], min_val = [0.004188], max_val = [0.004272], step = [6]",
        "val = [nan], pre_val = [nan], min_val = [0.089474], max_val = [0.130423], step = [7]",
        "val = [nan], pre_val = [nan], min_val = [0.026273], max_val = [0.026949], step = [7]",
    )
]

# Modes 2 and 3: rank 2, the step of the fault. It is the only error.
MODE_2 = [
    "SilentCheck get L1 Error, input message: val = [inf], pre_val = [0.105156], min_val = [0.089474], "
    "max_val = [0.130423], step = [5],         c_min_steps = [100], c_thresh_l1 = [1000000.000000], "
    "c_coeff_l1 = [100000.000000], c_thresh_l2 = [10000.000000], c_coeff_l2 = [5000.000000] npu_asd_detect = [2]."
]
MODE_3 = [MODE_2[0].replace("npu_asd_detect = [2]", "npu_asd_detect = [3]")]

# Mode 3: rank 2, checks that found nothing. After each comes the line of the constants.
MODE_3_NORMAL = [
    "val = [0.004220], pre_val = [0.004272], min_val = [0.004189], max_val = [0.004272], step = [4].",
    "val = [0.007812], pre_val = [0.007812], min_val = [0.007812], max_val = [0.007812], step = [5].",
    "val = [0.000000], pre_val = [0.000000], min_val = [0.000000], max_val = [0.000000], step = [5].",
]
MODE_3_CONSTANTS = (
    "c_min_steps = [100], c_thresh_l1 = [1000000.000000], c_coeff_l1 = [100000.000000], "
    "c_thresh_l2 = [10000.000000], c_coeff_l2 = [5000.000000], npu_asd_detect = [3]"
)
