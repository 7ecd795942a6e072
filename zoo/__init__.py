"""The model zoo: recipes for more than a hundred real models, and the tool that builds them (`python -m zoo.build`)."""
