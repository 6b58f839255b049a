"""A module that imports one that does not exist."""

import a_module_that_is_not_there  # noqa: F401
