# Stands for the package while types are checked: reading all of it takes longer than checking this project.
from typing import Any

def __getattr__(name: str) -> Any: ...
