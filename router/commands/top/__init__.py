"""`warmroute top`: what the dashboard shows, in a terminal.

command   asks the router, prints one page or shows it until q is pressed
screen    what is shown: lines and tables, in as many rows as there is room for
plain     the same as plain text, which needs no library
terminal  the same with colours, drawn by rich (the extra `top`)
"""
