"""CPU and memory cost of the router alone.

decision       CPU of placing a request, and of KV events
world          the router and engines that it is measured in
sharing        CPU and bytes of updates between routers
growth         CPU as replicas grow in number
sizing         CPU and memory by replicas and streams
corpus         the texts
sizing_report  its sums and table
state          handing state over to another router
memory         bytes by purpose, CPU of the start
"""
