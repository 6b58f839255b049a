"""Prints which libraries of networks and images are imported once all recipes are made."""

import sys

from ghostbatch.study import RECIPES

for make in RECIPES.values():
    make()
print({"torchvision", "timm", "PIL"} & set(sys.modules))
