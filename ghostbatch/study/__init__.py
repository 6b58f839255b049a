"""The paper's tables and figures, declared, and the runner that executes their cells."""

from ghostbatch.recipes import RECIPES, find_recipe
from ghostbatch.study.cost import Cost, measure_cost
from ghostbatch.study.declare import Cell, Row, Study
from ghostbatch.study.executor import Event, Failure, Where, WorkerDied
from ghostbatch.study.instruments import Instrument, measure
from ghostbatch.study.manifest import read_study
from ghostbatch.study.runner import run_study
from ghostbatch.study.studies import STUDIES, find_study

__all__ = [
    "RECIPES",
    "STUDIES",
    "Cell",
    "Cost",
    "Event",
    "Failure",
    "Instrument",
    "Row",
    "Study",
    "Where",
    "WorkerDied",
    "find_recipe",
    "find_study",
    "measure",
    "measure_cost",
    "read_study",
    "run_study",
]
