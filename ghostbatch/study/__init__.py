"""The paper's tables and figures, declared, and the runner that executes their cells."""

from ghostbatch.study.instruments import INSTRUMENTS, measure
from ghostbatch.study.recipes import PROVISIONAL, RECIPES, find_recipe
from ghostbatch.study.runner import OnNews, WorkerDied, run_cells
from ghostbatch.study.studies import STUDIES, Cell, Study, columns, find_study

__all__ = [
    "INSTRUMENTS",
    "PROVISIONAL",
    "RECIPES",
    "STUDIES",
    "Cell",
    "OnNews",
    "Study",
    "WorkerDied",
    "columns",
    "find_recipe",
    "find_study",
    "measure",
    "run_cells",
]
