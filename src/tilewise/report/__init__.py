"""What the commands' JSON shows: pictures, tables and sentences, and one page of them.

`kinds` knows every file that a command writes and which module turns it into a `Section` (`speed`, `memory`, `lab`, `io`,
`training`, `tests`); `picture` draws panels, for the page and for the commands' `--plot`; `results` reads files; `html` puts
them together. Pictures and sentences come from stored data alone, so that a file says the same wherever it is drawn.
"""
