"""Try a method: real learners in virtual time, in one process, compared over the same seeds.

```python
from decoupled_diloco import lab

study = lab.Study(model=model, batches=batches, loss=loss, evaluation=evaluation, steps=200)
study.run("data-parallel")
study.run("decoupled")
study.run("mine", merge=my_merge)
study.table()
```

- `lab_study` runs methods, keeps their results, and compares them. `functions` makes a workload
  of the user's functions, `methods` the settings of a run from a method's arguments.
- `statistics` has intervals and equivalence tests of paired runs.
- `check` tests a merge rule, an outer optimizer or a codec by a table of properties.
"""

from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.study.check import check
from decoupled_diloco_lab.study.lab_study import Study
from decoupled_diloco_lab.study.statistics import Equivalence, interval, power

__all__ = ["Equivalence", "LearnerSpec", "Study", "check", "interval", "power"]
