"""Stream of KV events of one engine: decoding, ordering, proof of continuity.

decoding  decoder for one message
stream    order and continuity of batches
batches   waiting and applied batches of a stream
replay    schedule of replay requests
steps     steps, limits and counters of a stream
sink      interfaces of the index that receives events and state
states    serialized state of one engine
"""
