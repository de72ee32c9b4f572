-- Sends the lines of the file BODIES in turn, each as a JSON body; prints one line of JSON at the end.
local requests, at = {}, 0

function init(args)
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  for line in io.lines(os.getenv("BODIES")) do
    requests[#requests + 1] = wrk.format(nil, nil, nil, line)
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency, _)
  local failed = summary.errors
  local lost = failed.connect + failed.read + failed.write + failed.timeout
  io.write(string.format(
    '{"requests": %d, "seconds": %.6f, "p50": %.6f, "p99": %.6f, "status_errors": %d, "lost": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    failed.status, lost))
end
