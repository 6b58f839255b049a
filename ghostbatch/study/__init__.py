"""The paper's tables and figures, declared, and the runner that executes their cells."""

from ghostbatch.study.executor import Event, Executor, Job, Where, WorkerDied
from ghostbatch.study.instruments import Instrument, measure
from ghostbatch.study.manifest import Manifest, RowEntry
from ghostbatch.study.recipes import PROVISIONAL, RECIPES, find_recipe
from ghostbatch.study.runner import run_cells, run_study
from ghostbatch.study.studies import STUDIES, Cell, Row, Study, find_study

__all__ = [
    "PROVISIONAL",
    "RECIPES",
    "STUDIES",
    "Cell",
    "Event",
    "Executor",
    "Instrument",
    "Job",
    "Manifest",
    "Row",
    "RowEntry",
    "Study",
    "Where",
    "WorkerDied",
    "find_recipe",
    "find_study",
    "measure",
    "run_cells",
    "run_study",
]
