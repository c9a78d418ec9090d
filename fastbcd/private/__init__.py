"""Private inference: the cost of the ReLUs kept, and nets that evaluate only those.

cost = fastbcd.private.cost(fastbcd.masks(net), "crypten", bandwidth="1Gbit", rtt="1ms")
small = fastbcd.private.gather_form(net)                # evaluates exactly the kept ReLUs
fastbcd.private.export(small, images, "net.onnx")       # or .pt2
target = fastbcd.private.Target(seconds=1.5, protocol="crypten", bandwidth="100Mbit", rtt="40ms")
fastbcd.bcd(net, data, target)                          # a budget as a cost
small = fastbcd.private.merge(net, data, target)        # linear runs as single convolutions
result = fastbcd.private.run(net, images, engine="spu-cheetah")  # two parties on this machine
ours = fastbcd.private.measure("spu-cheetah")            # figures of this machine
fastbcd.private.ranges(net, data)            # values that a fixed-point format must hold
"""

from fastbcd.private.costs import Cost, SiteCost, cost
from fastbcd.private.exporting import export
from fastbcd.private.gathering import gather_form
from fastbcd.private.measuring import measure
from fastbcd.private.merging import Merged, merge
from fastbcd.private.protocols import PROTOCOLS, Constant, Protocol
from fastbcd.private.running import Inference, Measured, run
from fastbcd.private.target import Target
from fastbcd.private.value_ranges import Ranges, SiteRange, ranges

__all__ = [
    "PROTOCOLS",
    "Constant",
    "Cost",
    "Inference",
    "Measured",
    "Merged",
    "Protocol",
    "Ranges",
    "SiteCost",
    "SiteRange",
    "Target",
    "cost",
    "export",
    "gather_form",
    "measure",
    "merge",
    "ranges",
    "run",
]
