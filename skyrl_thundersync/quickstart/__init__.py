"""The pair of models and the tasks of the quickstart, and the script that makes the models."""
