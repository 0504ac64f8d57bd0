"""The scheduler process of ``word_server``."""

from word_server import run_scheduler

if __name__ == "__main__":
    run_scheduler()
