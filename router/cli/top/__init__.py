"""`warmroute top`: the dashboard in a terminal.

command   asks the router, prints one page or shows it until q is pressed
screen    the content: lines and tables, cut to the rows of the terminal
plain     the same as plain text, which needs no library
terminal  the same with colours, drawn by rich (the extra `top`)
"""
