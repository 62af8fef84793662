-- wrk script: post the files named in BODIES (one path a line) in turn, with the lines of HEADERS, to the paths of the URL in PATHS in turn, or
-- to that of the URL; print one line of figures.
local bodies = {}
for path in os.getenv("BODIES"):gmatch("[^\n]+") do
  local file = assert(io.open(path, "rb"))
  bodies[#bodies + 1] = file:read("*a")
  file:close()
end
wrk.method = "POST"
for name, value in os.getenv("HEADERS"):gmatch("([^\n:]+): ([^\n]+)") do
  wrk.headers[name] = value
end

local requests, turn = {}, 0

function init(args)
  for path in (os.getenv("PATHS") or wrk.path):gmatch("[^\n]+") do
    for _, body in ipairs(bodies) do
      requests[#requests + 1] = wrk.format(nil, path, nil, body)
    end
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency, _)
  local errors = summary.errors
  local bad = errors.status + errors.connect + errors.read + errors.write + errors.timeout
  local rate = summary.requests / (summary.duration / 1e6)
  io.write(string.format("RESULT %.2f %.3f %.3f %d\n", rate, latency:percentile(50) / 1000, latency:percentile(99) / 1000, bad))
end
