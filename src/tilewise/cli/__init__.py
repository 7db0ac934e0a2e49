"""The command line: `main` holds the commands, one file each; `output` is how all of them show and store results."""
