"""The scheduler process of ``faulty_server``."""

from helpers.faulty_server import run_scheduler

if __name__ == "__main__":
    run_scheduler()
