"""Stream of KV events of one engine: decoding, ordering, proof of continuity.

batch_decoder      decoder for one message
stream             order and continuity of batches
reorder_buffer     waiting and applied batches of a stream
replay_timer       schedule of replay requests
stream_steps       steps, limits and counters of a stream
sink               interfaces of the index that receives events and state
event_state_codec  serialized state of one engine
"""
