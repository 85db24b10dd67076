"""What the router costs alone.

decision  CPU of placing a request, and of KV events   world   the router and engines that it is measured in
sharing   CPU and bytes of what routers tell each other
growth    CPU as replicas grow in number               sizing  CPU and memory by replicas and streams
conversations  the texts                               sizing_report  its sums and table
state     leaving what is known, and beginning with it
memory    bytes by what they are kept for, CPU of the start
"""
