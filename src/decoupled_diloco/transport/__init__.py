"""Control and data planes between learners and shards, and all other HTTP traffic.

`interface` defines the interface of a transport. A `Client` dials, a `Server` accepts, and a
`Channel` carries small ordered messages. Payloads have URLs. `http_client` and `http_server`
implement it over HTTP; virtual machines have their own implementation. Readers of a running syncer
use `fetch`, and the doctor uses `reachability`. Both use the session of `http_client`, the only
HTTP client of the project. Everything runs on one event loop, that of the process. Only `fetch`
creates a separate loop, one per request. The transport makes no protocol decisions and may not
import the protocol; it handles only JSON and bytes.
"""
