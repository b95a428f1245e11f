"""Which file of tests a process of `make test` takes next. tests/conftest.py imports it where xdist runs."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

COMPUTING = ("tests/unit/", "tests/property/", "tests/simulation/")


class OneComputes(LoadFileScheduling):
    """The first process takes tests that compute. The others take those that wait for processes and deadlines, three of
    which use about one core. A process without tests of its kind takes any."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        computes = node is self.nodes[0]
        file = next((file for file in self.workqueue if file.startswith(COMPUTING) is computes), None)
        if file is not None:
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)
