"""Request parsing, before any decision: the caller, the prompt, and the body for the engine.

Both frontends (proxy/, extproc/) use this package. So keys, rates, isolation, repairs and the observatory are the same
for each way into the router. No module here depends on how a request arrived, or on how its answer is returned.

context           the parts that the frontends of one process share, and their settings
paths             paths for engines, and all others
auth              caller of a request
session_identity  identity of its conversation
model_names       the model that it names
gateway_rules     rules for a gateway to apply while no picker answers
codings           content codings of bodies
rate_reservation  a request is taken from its tenant's rate before its body is read
ttft_deadline     deadline of a client for its first token
parser            parses requests; body parses and hashes, parse_queue takes turns for long ones
proxied_request   the result
failover_policy   decides on stream failover
upstream_headers  header lines for engines
prompt_observer   compares a prompt with the texts of earlier prompts
placement_call    a lease, or a refusal with a message for the client
local_responses   answers of the router itself: ids, errors, pages
usage             requests usage in a stream if its client did not
token_estimate    tokens of an answer if its engine does not count them
"""
