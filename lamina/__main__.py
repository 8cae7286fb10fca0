"""``python -m lamina``: the same as ``lamina-launch``."""

from lamina.cli.launch import run_program

if __name__ == "__main__":
    run_program()
