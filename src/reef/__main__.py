"""`python -m reef` is the command `reef`, where the script is not on the path."""

from reef_command import main

if __name__ == "__main__":
    main()
