"""Runs rdma-core's own tests, which Debian has in /usr/share/doc/rdma-core/tests, over the device.

    rdma_core_tests.py FOLDER ADDRESS    FOLDER: a copy of them, unpacked; ADDRESS: of the device

They ask sysfs for the device's interface, and skip what connects by the rdma_cm without: here they have ADDRESS."""
import collections
import os
import sys
import unittest

folder, address = sys.argv[1:]
# As their own runner does: some import others as of a package, some not.
sys.path[:0] = [folder, os.path.dirname(folder)]
import tests  # noqa: E402
import tests.base  # noqa: E402
from args_parser import parser  # noqa: E402

sys.argv[1:] = []
parser.parse_args()


def has_address(self, dev, port, index):
    self.args.append([dev, port, index, address, "00:00:00:00:00:00"])


tests.base.RDMATestCase._get_ip_mac = has_address
result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(tests))
for reason, count in collections.Counter(reason for _, reason in result.skipped).most_common():
    print(count, "skipped:", reason)
passed = result.testsRun - len(result.skipped) - len(result.failures) - len(result.errors)
print("passed: %d, skipped: %d" % (passed, len(result.skipped)))
# Of rdma-core 44 there are 106: fewer are no proof.
sys.exit(not result.wasSuccessful() or passed < 100)
