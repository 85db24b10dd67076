"""What clients see when replicas, clients or the network go wrong, judged against goals.

rows    what happens, a file for goals of one kind    upstream  a replica that goes wrong on demand
bench   a router before such replicas                 judge     whether a stream's end was honest
hostile a tenant that uses up what it can              hostile_store  a store that floods
matrix  the goals and their rows                      soak      faults for hours
report  tables                                        command   the command line
"""
