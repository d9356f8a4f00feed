-- Dissectors for Wireshark and tshark: RDS over TCP and over RDMA, RTRS, RNBD.
--
--   tshark -X lua_script:bowline.lua -r capture.pcap        or in a folder that Wireshark loads:
--   "Personal Lua Plugins" and "Global Lua Plugins" of Help, About, Folders
--
-- Wireshark itself knows RoCEv2, InfiniBand and the RDMA connection manager, and asks us for the
-- payload. The connection manager's messages show which queue pair carries which protocol. In a
-- capture that begins later, packets are known by their content, if that is possible.
--
-- The rules are those of docs/spec. crates/bowline-wire/tests/dissectors.rs compares the tables in
-- capitals with what bowline-wire reads and writes, `cargo xtask dissect` the whole with captures.
-- Lua 5.2 to 5.4: no operators on bits, no division of integers.

if bowline_dissectors then return end -- loaded already, from another folder
bowline_dissectors = true

local rds = Proto("rds", "Reliable Datagram Sockets")
local rtrs = Proto("rtrs", "RDMA Transport (RTRS)")
local rnbd = Proto("rnbd", "RDMA Network Block Device")

--------------------------------------------------------------------------------------------------
-- Tables: name, offset, bytes, label, and how it is shown (decimal unless it says)

local RDS_TCP_PORT = 16385
local RDS_RDMA_PORT_V4 = 18634
local RDS_RDMA_PORT_V6 = 16385
local RDS_HEADER_LEN = 48
local RDS_MAP_LEN = 8192
local RDS_PROBE_PORT = 1

-- Big-endian.
local RDS_HEADER = {
    { "sequence", 0, 8, "Sequence number" },
    { "ack", 8, 8, "Acknowledged sequence number" },
    { "len", 16, 4, "Payload length of the message" },
    { "sport", 20, 2, "Source RDS port" },
    { "dport", 22, 2, "Destination RDS port" },
    { "flags", 24, 1, "Flags", "hex" },
    { "credit", 25, 1, "Credits" },
    { "padding", 26, 4, "Padding", "hex" },
    { "csum", 30, 2, "Header checksum", "hex" },
    { "ext", 32, 16, "Extension headers", "bytes" },
}

-- Bit, name.
local RDS_FLAGS = {
    { 0x01, "CONG_BITMAP" },
    { 0x02, "ACK_REQUIRED" },
    { 0x04, "RETRANSMITTED" },
}
-- Oracle's kernel, and kernels of 7.x: no name in bowline-wire.
local RDS_FLAGS_OF_OTHERS = {
    { 0x08, "HB_PING" },
    { 0x10, "HB_PONG" },
    { 0x20, "EXTENSIONS" },
}

-- Type, name, bytes behind the type.
local RDS_EXTENSIONS = {
    { 1, "version", 4 },
    { 2, "rdma", 4 },
    { 3, "rdma-dest", 8 },
    { 4, "rdma-bytes", 8 },
    { 5, "npaths", 2 },
    { 6, "gen", 4 },
    { 8, "sport-idx", 1 },
    { 0x42, "bowline", 5 },
}

-- Private data of the connection manager, behind the two addresses; big-endian.
local RDS_CONNECT = {
    { "major", 0, 1, "Protocol, major version" },
    { "minor", 1, 1, "Protocol, minor version" },
    { "minors", 2, 2, "Minor versions supported", "hex" },
    { "tos", 4, 1, "Type of service" },
    { "ack", 8, 8, "Acknowledged sequence number" },
    { "credit", 16, 4, "Credits" },
}
-- In the padding behind them, of bowline nodes.
local RDS_CONNECT_BOWLINE = {
    { "mark", 20, 1, "bowline node", "hex" },
    { "frame_kib", 21, 1, "Memory of a frame, KiB" },
    { "max_message", 22, 2, "Longest message, in 64 KiB" },
}

local RTRS_MAGIC = 0x1bbd

-- Type, name.
local RTRS_TYPES = {
    { 0, "INFO_REQ" },
    { 1, "INFO_RSP" },
    { 2, "WRITE" },
    { 3, "READ" },
    { 4, "RKEY_RSP" },
}
local RTRS_IMMEDIATES = {
    { 0, "request" },
    { 1, "done" },
    { 2, "done invalidated" },
    { 3, "given up" },
    { 8, "heartbeat" },
    { 9, "heartbeat ack" },
}

-- All that follows is little-endian.
local RTRS_CON_REQ = {
    { "magic", 2, 2, "Magic", "hex" },
    { "version", 4, 2, "Version", "hex" },
    { "cid", 6, 2, "Connection" },
    { "cid_num", 8, 2, "Connections of the path" },
    { "recon_cnt", 10, 2, "Attempt" },
    { "path", 12, 16, "Path", "bytes" },
    { "session", 28, 16, "Session", "bytes" },
    { "first", 44, 1, "The session may be new" },
    { "notices", 45, 3, "Notices of paths given up", "text" },
    { "counted_keys", 48, 8, "Counted keys", "text" },
}
local RTRS_CON_RSP = {
    { "magic", 0, 2, "Magic", "hex" },
    { "version", 2, 2, "Version", "hex" },
    { "errno", 4, 2, "Error", "errno" },
    { "queue_depth", 6, 2, "Chunks" },
    { "max_io", 8, 4, "Most data of a request" },
    { "max_hdr", 12, 4, "Most bytes of a message and its header" },
    { "con_flags", 16, 4, "Flags", "hex" },
    { "notices", 45, 3, "Notices of paths given up", "text" },
    { "counted_keys", 48, 8, "Counted keys", "text" },
}
local RTRS_INFO_REQ = {
    { "type", 0, 2, "Type", RTRS_TYPES },
    { "name", 2, 255, "Session name", "text" },
}
local RTRS_INFO_RSP = {
    { "type", 0, 2, "Type", RTRS_TYPES },
    { "sg_cnt", 2, 2, "Descriptors" },
}
local RTRS_DESC = {
    { "addr", 0, 8, "Address", "hex" },
    { "key", 8, 4, "Remote key", "hex" },
    { "desc_len", 12, 4, "Length" },
}
local RTRS_WRITE = {
    { "type", 0, 2, "Type", RTRS_TYPES },
    { "usr_len", 2, 2, "Length of the user message" },
}
local RTRS_READ = {
    { "type", 0, 2, "Type", RTRS_TYPES },
    { "usr_len", 2, 2, "Length of the user message" },
    { "flags", 4, 2, "Flags", "hex" },
    { "sg_cnt", 6, 2, "Descriptors" },
}
local RTRS_RKEY_RSP = {
    { "type", 0, 2, "Type", RTRS_TYPES },
    { "buf_id", 2, 2, "Chunk" },
    { "key", 4, 4, "Remote key", "hex" },
}

local RNBD_TYPES = {
    { 0, "SESS_INFO" },
    { 1, "SESS_INFO_RSP" },
    { 2, "OPEN" },
    { 3, "OPEN_RSP" },
    { 4, "IO" },
    { 5, "CLOSE" },
}
local RNBD_ACCESS = {
    { 0, "ro" },
    { 1, "rw" },
    { 2, "migration" },
}
local RNBD_OPS = {
    { 0, "READ" },
    { 1, "WRITE" },
    { 2, "FLUSH" },
    { 3, "DISCARD" },
    { 4, "SECURE_ERASE" },
    { 5, "WRITE_ZEROES" },
}
local RNBD_FLAGS = {
    { 0x100, "SYNC" },
    { 0x200, "FUA" },
    { 0x400, "PREFLUSH" },
    { 0x800, "NOUNMAP" },
}
local RNBD_CACHE = {
    { 0x01, "FUA" },
    { 0x02, "WRITE_BACK" },
}

local RNBD_SESS_INFO = {
    { "type", 0, 2, "Type", RNBD_TYPES },
    { "ver", 4, 1, "Version" },
}
local RNBD_OPEN = {
    { "type", 0, 2, "Type", RNBD_TYPES },
    { "access", 4, 1, "Access", RNBD_ACCESS },
    { "name", 6, 255, "Device name", "text" },
}
local RNBD_OPEN_RSP = {
    { "type", 0, 2, "Type", RNBD_TYPES },
    { "device_id", 4, 4, "Device" },
    { "nsectors", 8, 8, "Sectors of 512 bytes" },
    { "max_hw_sectors", 16, 4, "Most sectors of a request" },
    { "max_write_zeroes_sectors", 20, 4, "Most sectors of zeroes" },
    { "max_discard_sectors", 24, 4, "Most sectors of a discard" },
    { "discard_granularity", 28, 4, "Discard granularity" },
    { "discard_alignment", 32, 4, "Discard alignment" },
    { "physical_block_size", 36, 2, "Physical block" },
    { "logical_block_size", 38, 2, "Logical block" },
    { "max_segments", 40, 2, "Most segments" },
    { "secure_discard", 42, 2, "Secure erase" },
    { "obsolete_rotational", 44, 1, "Rotational, not used any more" },
    { "cache_policy", 45, 1, "Cache", "hex" },
}
local RNBD_IO = {
    { "type", 0, 2, "Type", RNBD_TYPES },
    { "device_id", 4, 4, "Device" },
    { "sector", 8, 8, "Sector" },
    { "rw", 16, 4, "Operation and flags", "hex" },
    { "len", 20, 4, "Length" },
    { "prio", 24, 2, "Priority", "hex" },
}
local RNBD_CLOSE = {
    { "type", 0, 2, "Type", RNBD_TYPES },
    { "device_id", 4, 4, "Device" },
}

-- Of include/uapi/asm-generic/errno*.h, those that RTRS and RNBD answer with.
local ERRNOS = {
    [0] = "success", [1] = "EPERM", [2] = "ENOENT", [5] = "EIO", [6] = "ENXIO", [11] = "EAGAIN",
    [12] = "ENOMEM", [13] = "EACCES", [15] = "ENOTBLK", [16] = "EBUSY", [17] = "EEXIST",
    [19] = "ENODEV", [22] = "EINVAL", [28] = "ENOSPC", [52] = "EBADE",
    [61] = "ENODATA", [62] = "ETIME", [67] = "ENOLINK", [75] = "EOVERFLOW", [84] = "EILSEQ",
    [95] = "EOPNOTSUPP", [103] = "ECONNABORTED", [104] = "ECONNRESET", [107] = "ENOTCONN",
    [109] = "ETOOMANYREFS", [110] = "ETIMEDOUT", [121] = "EREMOTEIO",
}

--------------------------------------------------------------------------------------------------
-- From tables to fields

local fields = {} -- by the name one filters for

local function field(proto, name, make)
    local filter = proto.name:lower() .. "." .. name
    if not fields[filter] then
        fields[filter] = make(filter)
    end
    return fields[filter]
end

local function names_of(rows)
    local names = {}
    for _, row in ipairs(rows) do
        names[row[1]] = row[2]
    end
    return names
end

local function declare(proto, rows)
    for _, row in ipairs(rows) do
        local name, _, bytes, label, how = row[1], row[2], row[3], row[4], row[5]
        field(proto, name, function(filter)
            if how == "bytes" then
                return ProtoField.bytes(filter, label)
            elseif how == "text" then
                return ProtoField.string(filter, label)
            elseif how == "errno" then
                return ProtoField.int16(filter, label)
            end
            local names = type(how) == "table" and names_of(how) or nil
            local base = how == "hex" and base.HEX or base.DEC
            return ProtoField["uint" .. 8 * bytes](filter, label, base, names)
        end)
    end
end

-- Shows a message as its table has it; what lies beyond the end of `tvb` is not shown.
local function show(proto, tree, tvb, rows, little)
    for _, row in ipairs(rows) do
        local name, offset, bytes, how = row[1], row[2], row[3], row[5]
        if offset + bytes <= tvb:len() then
            local range = tvb:range(offset, bytes)
            local item = fields[proto.name:lower() .. "." .. name]
            if how == "text" then
                tree:add(item, range, range:raw():match("^[^\0]*"))
            elseif little and how ~= "bytes" then
                tree:add_le(item, range)
            else
                tree:add(item, range)
            end
        end
    end
end

-- Names of the bits of `value`, lowest first, joined by "|"; what has no name as one number.
local function bits(value, rows, digits)
    local out, rest = {}, value
    for _, row in ipairs(rows) do
        if value % (2 * row[1]) >= row[1] then
            out[#out + 1] = row[2]
            rest = rest - row[1]
        end
    end
    if rest ~= 0 then
        out[#out + 1] = string.format("0x%0" .. (digits or 2) .. "x", rest)
    end
    return #out == 0 and "0" or table.concat(out, "|")
end

local function errno_text(errno)
    return ERRNOS[errno] or string.format("errno %d", errno)
end

local function add_frame(tree, proto, name, label, number)
    tree:add(fields[proto.name:lower() .. "." .. name], number):set_generated()
end

local function hex(s)
    return (s:gsub(".", function(c) return string.format("%02x", c:byte()) end))
end

-- Appends to what the Info column says of this packet, or begins it.
local function say(pinfo, name, text)
    if tostring(pinfo.cols.protocol) == name then
        pinfo.cols.info:append("; " .. text)
    else
        pinfo.cols.protocol:set(name)
        pinfo.cols.info:set(text)
    end
end

local function le16(s, at) return s:byte(at + 1) + 256 * s:byte(at + 2) end
local function le32(s, at) return le16(s, at) + 65536 * le16(s, at + 2) end
local function be16(s, at) return 256 * s:byte(at + 1) + s:byte(at + 2) end
local function be32(s, at) return 65536 * be16(s, at) + be16(s, at + 2) end

declare(rds, RDS_HEADER)
declare(rtrs, RTRS_CON_REQ)
declare(rtrs, RTRS_CON_RSP)
declare(rtrs, RTRS_INFO_REQ)
declare(rtrs, RTRS_INFO_RSP)
declare(rtrs, RTRS_DESC)
declare(rtrs, RTRS_WRITE)
declare(rtrs, RTRS_READ)
declare(rtrs, RTRS_RKEY_RSP)
declare(rnbd, RNBD_SESS_INFO)
declare(rnbd, RNBD_OPEN)
declare(rnbd, RNBD_OPEN_RSP)
declare(rnbd, RNBD_IO)
declare(rnbd, RNBD_CLOSE)

local function connect_rows(rows)
    local out = {}
    for _, row in ipairs(rows) do
        out[#out + 1] = { "connect." .. row[1], row[2], row[3], row[4], row[5] }
    end
    return out
end
local rds_connect = connect_rows(RDS_CONNECT)
local rds_connect_bowline = connect_rows(RDS_CONNECT_BOWLINE)
declare(rds, rds_connect)
declare(rds, rds_connect_bowline)

local function text_field(proto, name, label)
    field(proto, name, function(filter) return ProtoField.string(filter, label) end)
end
local function frame_field(proto, name, label, kind)
    field(proto, name, function(filter)
        return ProtoField.framenum(filter, label, base.NONE, kind)
    end)
end

text_field(rds, "summary", "Message")
text_field(rds, "kind", "Kind")
text_field(rds, "flags.names", "Flags by name")
text_field(rds, "map.ports", "Congested ports")
text_field(rds, "connect.source", "Address of the sender")
text_field(rds, "connect.destination", "Address of the receiver")
field(rds, "header", function(filter) return ProtoField.bytes(filter, "Header") end)
field(rds, "payload", function(filter) return ProtoField.bytes(filter, "Payload") end)
field(rds, "map", function(filter) return ProtoField.bytes(filter, "Congestion map") end)
field(rds, "map.count", function(filter)
    return ProtoField.uint32(filter, "Number of congested ports")
end)
for _, row in ipairs(RDS_EXTENSIONS) do
    local name = row[2]:gsub("-", "_")
    text_field(rds, "ext." .. name, "Extension " .. row[2])
end
frame_field(rds, "begins_in", "The message begins in packet", frametype.NONE)
frame_field(rds, "again", "The same packet as", frametype.NONE)

text_field(rtrs, "summary", "Packet")
text_field(rtrs, "kind", "Kind")
text_field(rtrs, "imm.names", "Immediate")
field(rtrs, "imm", function(filter)
    return ProtoField.uint32(filter, "Immediate", base.HEX)
end)
field(rtrs, "imm.type", function(filter)
    return ProtoField.uint32(filter, "Type of the immediate", base.DEC, names_of(RTRS_IMMEDIATES))
end)
field(rtrs, "chunk", function(filter) return ProtoField.uint32(filter, "Chunk") end)
field(rtrs, "off", function(filter) return ProtoField.uint32(filter, "Offset of the header") end)
field(rtrs, "data_len", function(filter) return ProtoField.uint32(filter, "Bytes of data") end)
field(rtrs, "done.errno", function(filter)
    return ProtoField.uint32(filter, "Error", base.DEC, ERRNOS)
end)
field(rtrs, "given_up", function(filter)
    return ProtoField.uint32(filter, "Path given up", base.HEX)
end)
field(rtrs, "time", function(filter)
    return ProtoField.double(filter, "Seconds since the request")
end)
frame_field(rtrs, "request_in", "Request in packet", frametype.REQUEST)
frame_field(rtrs, "answer_in", "Answer in packet", frametype.RESPONSE)
frame_field(rtrs, "begins_in", "Begins in packet", frametype.NONE)
frame_field(rtrs, "again", "The same packet as", frametype.NONE)
text_field(rnbd, "summary", "Message")
text_field(rnbd, "device", "Device name as it was opened")
text_field(rnbd, "op", "Operation")
text_field(rnbd, "io_flags", "Flags of the operation")
text_field(rnbd, "cache", "Cache by name")

local ERROR, WARN = expert.severity.ERROR, expert.severity.WARN
local experts = {
    checksum = ProtoExpert.new("rds.bad_checksum", "Wrong header checksum [R-105]",
        expert.group.CHECKSUM, ERROR),
    map_len = ProtoExpert.new("rds.bad_map", "Congestion map that is not 8192 bytes long [R-224]",
        expert.group.PROTOCOL, ERROR),
    no_header = ProtoExpert.new("rds.no_header",
        "No RDS header: the capture begins within a message", expert.group.PROTOCOL, WARN),
    dest_over_tcp = ProtoExpert.new("rds.dest_over_tcp",
        "RDMA_DEST over TCP harms a 6.12 kernel [R-118]", expert.group.PROTOCOL, ERROR),
}
rds.experts = { experts.checksum, experts.map_len, experts.no_header, experts.dest_over_tcp }

--------------------------------------------------------------------------------------------------
-- RDS: header, extensions, map

-- What stands in 16 bytes: rows of name, text, offset and length. Ends as bowline-wire does at a
-- type that it does not know [R-117].
local function extensions(area)
    local out, at = {}, 0
    local lens = {}
    for _, row in ipairs(RDS_EXTENSIONS) do
        lens[row[1]] = row
    end
    while at < 16 do
        local row = lens[area:byte(at + 1)]
        if not row or at + 1 + row[3] > 16 then break end
        local name, p, text = row[2], at + 1, nil
        if name == "version" then
            text = string.format("%d.%d", math.floor(be32(area, p) / 256), be32(area, p) % 256)
        elseif name == "rdma" or name == "gen" then
            text = string.format("0x%08x", be32(area, p))
        elseif name == "rdma-dest" then
            text = string.format("0x%08x+0x%x", be32(area, p), be32(area, p + 4))
        elseif name == "rdma-bytes" then
            local ways = { "write", "read" }
            local way = area:byte(p + 5)
            text = string.format("%d %s", be32(area, p), ways[way] or string.format("dir %d", way))
        elseif name == "npaths" then
            text = string.format("%d", be16(area, p))
        elseif name == "sport-idx" then
            text = string.format("%d", area:byte(p + 1))
        elseif name == "bowline" then
            local vp = area:byte(p + 1)
            local max = be32(area, p + 1)
            text = string.format("v%d path %d max %d", math.floor(vp / 16), vp % 16, max)
        end
        out[#out + 1] = { name = name, text = text, at = at, len = 1 + row[3] }
        at = at + 1 + row[3]
    end
    out.rest = area:sub(at + 1):gsub("\0+$", "")
    return out
end

-- The header of `s`, and what kind of message it begins.
local function header_of(s)
    local h = {
        len = be32(s, 16), sport = be16(s, 20), dport = be16(s, 22), flags = s:byte(25),
        credit = s:byte(26), csum = be16(s, 30), ext = extensions(s:sub(33, 48)),
        seq = UInt64.decode(s:sub(1, 8), false), ack = UInt64.decode(s:sub(9, 16), false),
    }
    local zero = h.seq == UInt64(0)
    local farewell = false
    for _, ext in ipairs(h.ext) do
        farewell = farewell or ext.name == "bowline" and ext.text:find(" max 0$") ~= nil
    end
    if h.flags == 1 then
        h.kind = "map"
    elseif h.sport == RDS_PROBE_PORT and h.dport == 0 then
        h.kind = zero and "greeting" or "probe-ping"
    elseif h.sport == 0 and h.dport == RDS_PROBE_PORT then
        h.kind = "probe-pong"
    elseif h.sport == 0 and h.dport == 0 then
        h.kind = h.len > 0 and "other" or farewell and "farewell" or "ack"
    elseif h.dport == 0 then
        h.kind = "ping"
    elseif h.sport == 0 then
        h.kind = "pong"
    else
        h.kind = "data"
    end
    return h
end

-- One line: what bowline-wire prints of a header. `cargo xtask dissect` compares the two.
local function header_line(h)
    local kinds = {
        map = " map", greeting = " probe-ping", ["probe-ping"] = " probe-ping",
        ["probe-pong"] = " probe-pong", ping = " ping", pong = " pong",
    }
    local out = string.format("seq %s %d->%d len %d flags %s%s", tostring(h.seq), h.sport, h.dport,
        h.len, bits(h.flags, RDS_FLAGS), kinds[h.kind] or "")
    if h.ack ~= UInt64(0) then out = out .. " ack " .. tostring(h.ack) end
    if h.credit ~= 0 then out = out .. string.format(" credit %d", h.credit) end
    if h.csum ~= 0 then out = out .. string.format(" csum 0x%04x", h.csum) end
    local between = " ext "
    for _, ext in ipairs(h.ext) do
        out, between = out .. between .. ext.name .. " " .. ext.text, ", "
    end
    if #h.ext.rest > 0 then out = out .. between .. "? " .. hex(h.ext.rest) end
    return out
end

-- Whether the checksum is right; absent counts as wrong.
local function checksum_fits(s)
    local sum = 0
    for at = 0, 46, 2 do
        sum = sum + be16(s, at)
    end
    while sum > 65535 do
        sum = sum % 65536 + math.floor(sum / 65536)
    end
    return sum == 65535 and be16(s, 30) ~= 0
end

-- The ports of a map, as "4000, 5000-5003", and how many [R-701].
local function ports_of(map)
    local ranges, count, from, to = {}, 0, nil, nil
    local function close()
        if from then
            ranges[#ranges + 1] = from == to and string.format("%d", from)
                or string.format("%d-%d", from, to)
        end
    end
    local at = 1
    while true do
        at = map:find("[^\0]", at)
        if not at then break end
        local byte = map:byte(at)
        for bit = 0, 7 do
            if byte % (2 * 2 ^ bit) >= 2 ^ bit then
                local port = 8 * (at - 1) + bit
                count = count + 1
                if to and port == to + 1 then
                    to = port
                else
                    close()
                    from, to = port, port
                end
            end
        end
        at = at + 1
    end
    close()
    return #ranges == 0 and "none" or table.concat(ranges, ", "), count
end

-- Shows a header in `tvb`, and returns the tree.
local function show_header(tvb, tree, h, over_tcp)
    local line = header_line(h)
    tree:append_text(", " .. line)
    local f = function(name) return fields["rds." .. name] end
    tree:add(f("summary"), line):set_generated()
    tree:add(f("kind"), h.kind):set_generated()
    local head = tree:add(f("header"), tvb:range(0, RDS_HEADER_LEN))
    show(rds, head, tvb, RDS_HEADER, false)
    local all = {}
    for _, table_of in ipairs({ RDS_FLAGS, RDS_FLAGS_OF_OTHERS }) do
        for _, row in ipairs(table_of) do all[#all + 1] = row end
    end
    head:add(f("flags.names"), tvb:range(24, 1), bits(h.flags, all))
    for _, ext in ipairs(h.ext) do
        local name = ext.name:gsub("-", "_")
        local item = head:add(f("ext." .. name), tvb:range(32 + ext.at, ext.len), ext.text)
        if over_tcp and ext.name == "rdma-dest" then
            item:add_proto_expert_info(experts.dest_over_tcp)
        end
    end
    local raw = tvb:range(0, RDS_HEADER_LEN):raw()
    if h.csum ~= 0 and not checksum_fits(raw) then
        head:add_proto_expert_info(experts.checksum)
    end
    return line
end

local function show_map(tree, range, map)
    if #map ~= RDS_MAP_LEN then
        tree:add_proto_expert_info(experts.map_len)
        return ""
    end
    local ports, count = ports_of(map)
    local item = range and tree:add(fields["rds.map"], range) or tree
    local a = item:add(fields["rds.map.count"], count)
    local b = item:add(fields["rds.map.ports"], ports)
    a:set_generated()
    b:set_generated()
    return count == 0 and " (no port congested)" or string.format(" (congested: %s)", ports)
end

-- Over TCP ---------------------------------------------------------------------------------------

-- No message is longer; bowline's nodes agree on more than the 1 MiB of a kernel [R-2030].
local LONGEST = 0x40000000

local function tcp_len(tvb, pinfo, offset)
    local len = tvb:range(offset + 16, 4):uint()
    if len > LONGEST then return tvb:len() - offset end
    return RDS_HEADER_LEN + len
end

local function tcp_message(tvb, pinfo, root)
    local tree = root:add(rds, tvb:range())
    local raw = tvb:range(0, RDS_HEADER_LEN):raw()
    local h = header_of(raw)
    -- Nothing but zeros is the middle of a map.
    if h.len > LONGEST or not raw:find("[^\0]") then
        tree:add_proto_expert_info(experts.no_header)
        say(pinfo, "RDS", "no RDS header here")
        return tvb:len()
    end
    local line = show_header(tvb, tree, h, true)
    if h.len > 0 then
        local range = tvb:range(RDS_HEADER_LEN, h.len)
        if h.kind == "map" then
            line = line .. show_map(tree, range, range:raw())
        else
            tree:add(fields["rds.payload"], range)
        end
    elseif h.kind == "map" then
        show_map(tree, nil, "")
    end
    say(pinfo, "RDS", line)
    return tvb:len()
end

function rds.dissector(tvb, pinfo, tree)
    dissect_tcp_pdus(tvb, tree, RDS_HEADER_LEN, tcp_len, tcp_message)
    return tvb:len()
end

--------------------------------------------------------------------------------------------------
-- Queue pairs: which protocol they carry, and the messages that packets are put together to

local ib = {
    opcode = Field.new("infiniband.bth.opcode"),
    qp = Field.new("infiniband.bth.destqp"),
    psn = Field.new("infiniband.bth.psn"),
    pad = Field.new("infiniband.bth.padcnt"),
    imm = Field.new("infiniband.immdt"),
    ieth = Field.new("infiniband.ieth"),
    key = Field.new("infiniband.reth.r_key"),
    dma_len = Field.new("infiniband.reth.dmalen"),
    attribute = Field.new("infiniband.mad.attributeid"),
    req_id = Field.new("infiniband.cm.req"),
    req_qp = Field.new("infiniband.cm.req.localqpn"),
    req_port = Field.new("infiniband.cm.req.serviceid.dport"),
    req_version = Field.new("infiniband.cm.req.ip_cm.ipv"),
    rep_id = Field.new("infiniband.cm.rep.remotecommid"),
    rep_qp = Field.new("infiniband.cm.rep.localqpn"),
    rej_id = Field.new("infiniband.cm.rej.remotecommid"),
    src4 = Field.new("ip.src"),
    dst4 = Field.new("ip.dst"),
    src6 = Field.new("ipv6.src"),
    dst6 = Field.new("ipv6.dst"),
}

-- The last value in this packet: of addresses the innermost.
local function last(extractor)
    local all = { extractor() }
    return all[#all] and all[#all].value
end

local function addresses(pinfo)
    local src, dst = last(ib.src6) or last(ib.src4), last(ib.dst6) or last(ib.dst4)
    return tostring(src or pinfo.src), tostring(dst or pinfo.dst)
end

-- The payload without the bytes that fill it up to a multiple of four.
local function unpadded(tvb)
    local pad = last(ib.pad) or 0
    if pad == 0 or tvb:len() < pad then return tvb end
    return tvb:range(0, tvb:len() - pad):tvb()
end

local SEND, WRITE, READ_REQUEST, ATOMIC, RESPONSE = "SEND", "WRITE", "READ", "ATOMIC", "response"
-- By opcode of a reliable connection: what it is, whether a message begins, whether it ends.
local OPCODES = {
    [0] = { SEND, true, false }, [1] = { SEND, false, false }, [2] = { SEND, false, true },
    [3] = { SEND, false, true }, [4] = { SEND, true, true }, [5] = { SEND, true, true },
    [6] = { WRITE, true, false }, [7] = { WRITE, false, false }, [8] = { WRITE, false, true },
    [9] = { WRITE, false, true }, [10] = { WRITE, true, true }, [11] = { WRITE, true, true },
    [12] = { READ_REQUEST, true, true }, [13] = { RESPONSE }, [14] = { RESPONSE },
    [15] = { RESPONSE }, [16] = { RESPONSE }, [17] = { RESPONSE }, [18] = { RESPONSE },
    [19] = { ATOMIC, true, true }, [20] = { ATOMIC, true, true },
    [22] = { SEND, false, true }, [23] = { SEND, true, true },
}

local asked      -- connections by the address and the number of who asked for them
local queues     -- by the address and number of a queue pair: since which packet which connection
local flows      -- what is put together, by direction
local packets    -- what is known of a packet, by its number
local sessions   -- RTRS sessions, by server and number
local map_parts  -- of RDS over RDMA: the message whose frames come

local function forget()
    asked, queues, flows, packets, sessions, map_parts = {}, {}, {}, {}, {}, {}
end
rds.init = forget
rtrs.init = forget
forget()

local function remember(address, qp, packet, connection, to_server)
    local key = address .. "/" .. qp
    queues[key] = queues[key] or {}
    local rows = queues[key]
    rows[#rows + 1] = { packet = packet, connection = connection, to_server = to_server }
end

-- The connection of a queue pair at the time of a packet.
local function connection_of(address, qp, packet)
    local found
    for _, row in ipairs(queues[address .. "/" .. qp] or {}) do
        if row.packet <= packet then found = row end
    end
    return found
end

-- Keeps the pieces of a message; of a long one the end alone, in which RTRS has its messages.
local function keep(flow, piece, limit)
    flow.total = flow.total + #piece
    flow.pieces[#flow.pieces + 1] = piece
    flow.kept = flow.kept + #piece
    while flow.kept - #flow.pieces[1] >= limit do
        flow.kept = flow.kept - #flow.pieces[1]
        table.remove(flow.pieces, 1)
    end
end

local function first_time(pinfo, piece, code, src, dst, qp)
    local op, begins, ends = OPCODES[code][1], OPCODES[code][2], OPCODES[code][3]
    local psn = last(ib.psn)
    local packet = {
        code = code, op = op, begins = begins, ends = ends, number = pinfo.number,
        first = pinfo.number, len = #piece, time = pinfo.rel_ts,
    }
    if ib.imm() then packet.imm = be32(ib.imm().range:raw(), 0) end
    if ib.ieth() then packet.invalidates = be32(ib.ieth().range:raw(), 0) end
    if ib.key() then
        packet.key, packet.dma_len = last(ib.key), string.format("%d", last(ib.dma_len))
    end
    if op == RESPONSE then return packet end

    local name = src .. ">" .. dst .. "/" .. qp
    local flow = flows[name] or { sent = {} }
    flows[name] = flow
    local earlier = flow.sent[psn]
    local behind = flow.next and (flow.next - psn) % 0x1000000
    if behind and behind > 0 and behind < 0x800000 and earlier and earlier.code == code
        and earlier.len == #piece then
        -- Sent again: what was found the first time holds.
        local again = {}
        for k, v in pairs(earlier) do again[k] = v end
        again.again, again.number = earlier.number, pinfo.number
        return again
    end
    if begins then
        flow.total, flow.kept, flow.pieces, flow.first = 0, 0, {}, pinfo.number
        flow.key = packet.key
    elseif not flow.first or flow.next ~= psn then
        flow.first = nil -- a packet is missing
    end
    if flow.first then
        keep(flow, piece, op == SEND and 0x100000 or 4096)
        packet.first, packet.key = flow.first, flow.key
        packet.total = flow.total
        if ends then
            packet.whole = table.concat(flow.pieces)
            flow.first = nil
        end
    end
    flow.sent[psn] = packet
    flow.next = (psn + 1) % 0x1000000
    if op == READ_REQUEST then flow.next = nil end -- its answers have numbers of this direction
    return packet
end

-- What a packet of a reliable connection is: as it was found when it was seen first.
local function packet_of(tvb, pinfo, guess)
    local code = last(ib.opcode)
    if not code or not OPCODES[code] then return end
    local packet = packets[pinfo.number]
    if packet then return packet end
    local src, dst = addresses(pinfo)
    local qp = last(ib.qp)
    local row = connection_of(dst, qp, pinfo.number)
    local piece = tvb:len() > 0 and tvb:range():raw() or ""
    if not row then
        local connection, to_server = guess(code, piece)
        if not connection then return end
        remember(dst, qp, pinfo.number, connection, to_server)
        row = connection_of(dst, qp, pinfo.number)
    end
    packet = first_time(pinfo, piece, code, src, dst, qp)
    packet.connection, packet.to_server = row.connection, row.to_server
    packet.flow = src .. ">" .. dst .. "/" .. qp
    packets[pinfo.number] = packet
    return packet
end

--------------------------------------------------------------------------------------------------
-- RDS over RDMA

local CM_REQ, CM_REJ, CM_REP = 0x10, 0x12, 0x13

local function show_connect(tvb, pinfo, root, v6)
    local width = v6 and 16 or 4
    local tree = root:add(rds, tvb:range(0, 2 * width + 24))
    local function address(at)
        local range = tvb:range(at, width)
        return tostring(v6 and range:ipv6() or range:ipv4()), range
    end
    local source, source_at = address(0)
    local destination, destination_at = address(width)
    tree:add(fields["rds.kind"], "connect"):set_generated()
    tree:add(fields["rds.connect.source"], source_at, source)
    tree:add(fields["rds.connect.destination"], destination_at, destination)
    local common = tvb:range(2 * width, 24):tvb()
    show(rds, tree, common, rds_connect, false)
    local text = string.format("RDS %s -> %s version %d.%d ack %s", source, destination,
        common:range(0, 1):uint(), common:range(1, 1):uint(), tostring(common:range(8, 8):uint64()))
    if common:range(20, 1):uint() == 0x42 then
        show(rds, tree, common, rds_connect_bowline, false)
        text = text .. ", a bowline node"
    end
    tree:append_text(", " .. text)
    pinfo.cols.protocol:set("RDS")
    pinfo.cols.info:append(", " .. text)
end

local function rds_cm(tvb, pinfo, tree)
    local attribute = last(ib.attribute)
    local src, dst = addresses(pinfo)
    if attribute == CM_REQ then
        local port, version = last(ib.req_port), last(ib.req_version)
        local v6 = version == 6
        if port ~= (v6 and RDS_RDMA_PORT_V6 or RDS_RDMA_PORT_V4) then return false end
        if tvb:len() < (v6 and 56 or 32) then return false end
        asked[src .. "/" .. last(ib.req_id)] =
            { proto = "rds", client = src, server = dst, client_qp = last(ib.req_qp), v6 = v6 }
        show_connect(tvb, pinfo, tree, v6)
        return true
    end
    local id = attribute == CM_REP and last(ib.rep_id) or attribute == CM_REJ and last(ib.rej_id)
    local connection = id and asked[dst .. "/" .. id]
    if not connection or connection.proto ~= "rds" then return false end
    if attribute == CM_REJ then
        tree:add(rds, tvb:range()):append_text(", refused")
        pinfo.cols.protocol:set("RDS")
        return true
    end
    if not pinfo.visited then
        remember(src, last(ib.rep_qp), pinfo.number, connection, true)
        remember(dst, connection.client_qp, pinfo.number, connection, false)
    end
    show_connect(tvb, pinfo, tree, connection.v6)
    return true
end

-- Without the connection manager's messages: a header whose checksum is right.
local function guess_rds(code, piece)
    if (code == 0 or code == 4) and #piece >= RDS_HEADER_LEN and be32(piece, 26) == 0
        and checksum_fits(piece) then
        return { proto = "rds" }, false
    end
end

-- Counts frames to messages: `begun` is the packet in which the message begins, `map` its bytes.
local function rds_learn(packet)
    local frame = packet.whole
    packet.learnt, packet.whole = true, nil
    if packet.op ~= SEND or not frame or #frame < RDS_HEADER_LEN then return end
    local h = header_of(frame)
    if h.kind == "ack" or h.kind == "farewell" then return end -- may come between frames [IB-56]
    local message = map_parts[packet.flow]
    if not message or message.left <= 0 then
        message = { left = h.len, first = packet.first, parts = {}, at = 0 }
        map_parts[packet.flow] = message
    end
    local bytes = #frame - RDS_HEADER_LEN
    packet.message = { first = message.first, from = message.at, to = message.at + bytes }
    message.left, message.at = message.left - bytes, message.at + bytes
    if h.kind == "map" then
        message.parts[#message.parts + 1] = frame:sub(RDS_HEADER_LEN + 1)
        if message.left <= 0 then packet.map = table.concat(message.parts) end
    end
end

local function rds_packet(payload, pinfo, root)
    local tvb = unpadded(payload)
    local packet = packet_of(tvb, pinfo, guess_rds)
    if not packet or packet.connection.proto ~= "rds" then return false end
    local tree = root:add(rds, tvb:range())
    if not packet.learnt then rds_learn(packet) end
    if packet.again then
        add_frame(tree, rds, "again", nil, packet.again)
        tree:append_text(" (sent again)")
    end
    if packet.op ~= SEND then
        tree:append_text(packet.op == RESPONSE and ", answer to a remote read or atomic"
            or packet.op == WRITE and ", remote write" or ", remote operation")
        tree:add(fields["rds.kind"], "remote " .. packet.op:lower()):set_generated()
        pinfo.cols.protocol:set("RDS")
        return true
    end
    if not packet.begins or tvb:len() < RDS_HEADER_LEN then
        local text = string.format("rest of the frame that begins in packet %d", packet.first)
        local message = packet.message
        if message and message.to - message.from > 0 then
            text = string.format("%s: bytes %d to %d of the message", text, message.from,
                message.to)
        end
        tree:append_text(", " .. text)
        add_frame(tree, rds, "begins_in", nil, message and message.first or packet.first)
        if packet.map then text = text .. show_map(tree, nil, packet.map) end
        say(pinfo, "RDS", text)
        return true
    end
    local h = header_of(tvb:range(0, RDS_HEADER_LEN):raw())
    local line = show_header(tvb, tree, h, false)
    if tvb:len() > RDS_HEADER_LEN then
        tree:add(fields["rds.payload"], tvb:range(RDS_HEADER_LEN))
    end
    local message = packet.message
    if message and message.first ~= pinfo.number then
        add_frame(tree, rds, "begins_in", nil, message.first)
    end
    if message and (message.from > 0 or message.to < h.len) then
        line = string.format("%s, bytes %d to %d", line, message.from, message.to)
    end
    if packet.map then line = line .. show_map(tree, nil, packet.map) end
    say(pinfo, "RDS", (packet.again and "again: " or "") .. line)
    return true
end

--------------------------------------------------------------------------------------------------
-- RNBD: user messages of RTRS

local RNBD_OP_NAMES, RNBD_TYPE_NAMES = names_of(RNBD_OPS), names_of(RNBD_TYPES)
local RNBD_LENS = { [0] = 36, [2] = 264, [4] = 24, [5] = 8 }

-- Tells whether `s` can be the user message of a request.
local function is_rnbd(s)
    local least = #s >= 4 and RNBD_LENS[le16(s, 0)]
    return least and #s >= least and (#s == least or le16(s, 0) == 4 and #s == 32)
end

-- One line for a message, and what the session learns of it.
local function rnbd_line(s, session)
    local kind = le16(s, 0)
    local name = RNBD_TYPE_NAMES[kind]
    if kind == 0 or kind == 1 then
        return string.format("%s version %d", name, s:byte(5)), name
    elseif kind == 2 then
        local device = s:sub(7, 261):match("^[^\0]*")
        local access = names_of(RNBD_ACCESS)[s:byte(5)] or string.format("access %d", s:byte(5))
        return string.format("OPEN %q %s", device, access), name, device
    elseif kind == 3 then
        return string.format("OPEN_RSP device %d, %s sectors, blocks of %d", le32(s, 4),
            tostring(UInt64.decode(s:sub(9, 16), true)), le16(s, 38)), name
    end
    local id = le32(s, 4)
    local device = session and session.devices[id]
    local shown = device and string.format("%q", device) or string.format("device %d", id)
    if kind == 5 then return "CLOSE " .. shown, name end
    local rw = le32(s, 16)
    local op = RNBD_OP_NAMES[rw % 256] or string.format("operation %d", rw % 256)
    local flags = rw - rw % 256
    local sector = tostring(UInt64.decode(s:sub(9, 16), true))
    local text = string.format("%s %s", op, shown)
    if le32(s, 20) > 0 then
        text = string.format("%s, %d bytes at sector %s", text, le32(s, 20), sector)
    end
    if flags ~= 0 then text = text .. ", " .. bits(flags, RNBD_FLAGS, 3) end
    return text, op
end

local function show_rnbd(tvb, root, packet)
    local s = tvb:range():raw()
    local tree = root:add(rnbd, tvb:range())
    local line = packet.rnbd_line or rnbd_line(s)
    tree:append_text(", " .. line)
    tree:add(fields["rnbd.summary"], line):set_generated()
    local kind = le16(s, 0)
    local tables = {
        [0] = RNBD_SESS_INFO, [1] = RNBD_SESS_INFO, [2] = RNBD_OPEN, [3] = RNBD_OPEN_RSP,
        [4] = RNBD_IO, [5] = RNBD_CLOSE,
    }
    show(rnbd, tree, tvb, tables[kind], true)
    if kind == 4 then
        local rw = le32(s, 16)
        local op = RNBD_OP_NAMES[rw % 256] or string.format("unknown (%d)", rw % 256)
        tree:add(fields["rnbd.op"], tvb:range(16, 1), op)
        tree:add(fields["rnbd.io_flags"], tvb:range(17, 3), bits(rw - rw % 256, RNBD_FLAGS, 3))
    elseif kind == 3 then
        tree:add(fields["rnbd.cache"], tvb:range(45, 1), bits(s:byte(46), RNBD_CACHE))
    end
    if packet.device then tree:add(fields["rnbd.device"], packet.device):set_generated() end
end

--------------------------------------------------------------------------------------------------
-- RTRS

local function bits_for(n)
    local bits = 0
    while 2 ^ bits < n do bits = bits + 1 end
    return bits
end

local function session_of(server, number)
    local key = server .. "/" .. number
    sessions[key] = sessions[key] or { devices = {}, paths = {} }
    return sessions[key]
end

local function rtrs_cm(tvb, pinfo, root)
    local attribute = last(ib.attribute)
    local src, dst = addresses(pinfo)
    if tvb:len() < 56 then return false end
    local s = tvb:range(0, 56):raw()
    if attribute == CM_REQ then
        if le16(s, 2) ~= RTRS_MAGIC then return false end
        local path, number = hex(s:sub(13, 28)), hex(s:sub(29, 44))
        local session = session_of(dst, number)
        session.paths[path] = session.paths[path] or {}
        asked[src .. "/" .. last(ib.req_id)] = {
            proto = "rtrs", client = src, server = dst, client_qp = last(ib.req_qp),
            cid = le16(s, 6), session = session, path = session.paths[path],
            requests = {}, keys = {},
        }
        local tree = root:add(rtrs, tvb:range(0, 56))
        tree:add(fields["rtrs.kind"], "CON_REQ"):set_generated()
        show(rtrs, tree, tvb, RTRS_CON_REQ, true)
        local text = string.format("CON_REQ connection %d of %d, attempt %d, path %s.. of %s..",
            le16(s, 6), le16(s, 8), le16(s, 10), path:sub(1, 8), number:sub(1, 8))
        tree:append_text(", " .. text)
        pinfo.cols.protocol:set("RTRS")
        pinfo.cols.info:append(", " .. text)
        return true
    end
    local id = attribute == CM_REP and last(ib.rep_id) or attribute == CM_REJ and last(ib.rej_id)
    local connection = id and asked[dst .. "/" .. id]
    if not connection or connection.proto ~= "rtrs" then return false end
    if le16(s, 0) ~= RTRS_MAGIC then return false end
    local tree = root:add(rtrs, tvb:range(0, 56))
    tree:add(fields["rtrs.kind"], "CON_RSP"):set_generated()
    show(rtrs, tree, tvb, RTRS_CON_RSP, true)
    local text = string.format("CON_RSP %d chunks, %d + %d bytes%s", le16(s, 6), le32(s, 8),
        le32(s, 12), le32(s, 16) % 4 >= 2 and ", new keys" or "")
    local errno = (65536 - le16(s, 4)) % 65536
    if errno ~= 0 then text = "CON_RSP refused: " .. errno_text(errno) end
    tree:append_text(", " .. text)
    pinfo.cols.protocol:set("RTRS")
    pinfo.cols.info:append(", " .. text)
    if attribute == CM_REP and not pinfo.visited then
        if connection.cid == 0 then connection.path.depth = le16(s, 6) end
        remember(src, last(ib.rep_qp), pinfo.number, connection, true)
        remember(dst, connection.client_qp, pinfo.number, connection, false)
    end
    return true
end

-- Where the header of a request lies in what was written to a chunk [RT-38]; the user message is
-- before it. `s` may be the end of it alone.
local function header_in(s)
    local n = #s
    if n >= 4 and le16(s, n - 4) == 2 and le16(s, n - 2) <= n - 4 then
        return { kind = "WRITE", at = n - 4, len = 4, usr_len = le16(s, n - 2), sg_cnt = 0 }
    end
    for sg_cnt = 1, 0, -1 do
        local len = 8 + 16 * sg_cnt
        local at = n - len
        if at >= 0 and le16(s, at) == 3 and le16(s, at + 6) == sg_cnt and le16(s, at + 2) == at then
            local header = { kind = "READ", at = at, len = len, usr_len = at, sg_cnt = sg_cnt }
            if sg_cnt == 1 then
                header.key, header.data_len = le32(s, at + 16), le32(s, at + 20)
                header.inval = le16(s, at + 4) % 2 == 1
            end
            return header
        end
    end
end

-- Without the connection manager's messages: what nobody else says.
local function guess_rtrs(code, piece, imm)
    local kind = imm and math.floor(imm / 2 ^ 28)
    local to_server
    if code == 11 and piece == "" and (imm == 0x80000000 or imm == 0x90000000) then
        to_server = nil
    elseif code == 11 and kind == 0 then
        local header = header_in(piece)
        local usr = header and piece:sub(header.at - header.usr_len + 1, header.at)
        if not usr or not is_rnbd(usr) then return end
        to_server = true
    elseif code == 5 and (kind == 1 or kind == 2) and #piece == 8 and le16(piece, 0) == 4
        and le16(piece, 2) == imm % 2 ^ 19 then
        to_server = false
    else
        return
    end
    local session = { devices = {}, paths = {} }
    return { proto = "rtrs", session = session, path = {}, requests = {}, keys = {} }, to_server
end

-- Whether this packet has what a server says of a session or a device. It writes that to the memory
-- which the request names; a bowline server does so as it ends the request [RT-47].
local function rnbd_answer(packet)
    local request, whole = packet.request, packet.whole
    local lens = { SESS_INFO = 36, OPEN = 56 }
    if not whole or #whole ~= lens[request.what] then return false end
    packet.rnbd, packet.rnbd_line = { 0, #whole }, rnbd_line(whole)
    if request.what == "OPEN" then
        packet.device = request.device
        packet.connection.session.devices[le32(whole, 4)] = request.device
    end
    return true
end

-- What a packet says, found when it is seen first: `kind`, `line`, and what belongs to it.
local function rtrs_learn(packet)
    local connection, imm, whole = packet.connection, packet.imm, packet.whole
    if packet.op == RESPONSE or packet.op == READ_REQUEST or packet.op == ATOMIC then
        packet.kind, packet.line = "other", "not used by RTRS"
        return
    end
    if not packet.ends then
        packet.kind = "part"
        packet.line = string.format("part of what begins in packet %d", packet.first)
        if packet.begins then
            packet.line = string.format("first part of %s bytes", packet.dma_len or "some")
        end
        return
    end
    local kind = imm and math.floor(imm / 2 ^ 28)
    local payload = imm and imm % 2 ^ 28
    if not imm and packet.invalidates then
        local request = connection.keys[packet.invalidates]
        packet.kind = "invalidate"
        packet.line = string.format("key 0x%08x is invalid now", packet.invalidates)
        packet.request = request
        return
    end
    if not imm and packet.op == WRITE then
        packet.kind, packet.request = "data", connection.keys[packet.key]
        packet.line = string.format("%d bytes of data", packet.total or packet.len)
        if packet.request then
            packet.line = string.format("%s for the request in packet %d", packet.line,
                packet.request.number)
            if rnbd_answer(packet) then packet.line = packet.rnbd_line end
        end
        return
    end
    if not imm then
        packet.kind = "message"
        packet.line = string.format("message of %d bytes", packet.total or 0)
        local type_ = whole and #whole >= 8 and le16(whole, 0)
        if type_ == 0 and #whole >= 272 then
            packet.kind = "INFO_REQ"
            packet.line = string.format("INFO_REQ session %q", whole:sub(3, 257):match("^[^\0]*"))
            if #whole > 272 then
                packet.line = string.format("%s, %d paths given up", packet.line,
                    math.floor((#whole - 272) / 4))
            end
        elseif type_ == 1 then
            packet.kind = "INFO_RSP"
            packet.line = string.format("INFO_RSP %d descriptors", le16(whole, 2))
        end
        return
    end
    if kind == 8 or kind == 9 then
        packet.kind = kind == 8 and "heartbeat" or "heartbeat ack"
        packet.line = packet.kind
    elseif kind == 3 then
        packet.kind = "given up"
        packet.line = string.format("given up 0x%07x", payload)
    elseif kind == 0 then
        packet.kind = "request"
        local where = string.format("0x%07x", payload)
        local depth = connection.path.depth
        if depth then
            local mem = 2 ^ (28 - bits_for(depth))
            packet.chunk, packet.off = math.floor(payload / mem), payload % mem
            where = string.format("chunk %d, header at %d", packet.chunk, packet.off)
        end
        packet.line = "request, " .. where
        local header = whole and header_in(whole)
        packet.header = header
        if header then
            local data = header.data_len or 0
            if header.kind == "WRITE" then
                -- The data may have come before, in a write of its own.
                data = (packet.off or packet.total - 4) - header.usr_len
            end
            packet.data_len = data
            packet.line = string.format("%s, %s of %d bytes", packet.line, header.kind, data)
            local usr = whole:sub(header.at - header.usr_len + 1, header.at)
            if is_rnbd(usr) then
                packet.rnbd = { header.at - header.usr_len, header.usr_len }
                packet.rnbd_line, packet.what, packet.device = rnbd_line(usr, connection.session)
                if le16(usr, 0) == 4 or le16(usr, 0) == 5 then
                    packet.device = connection.session.devices[le32(usr, 4)]
                end
                packet.line = packet.line .. ": " .. packet.rnbd_line
            end
            if header.key then connection.keys[header.key] = packet end
        end
        if packet.chunk then connection.requests[packet.chunk] = packet end
    elseif kind == 1 or kind == 2 then
        local id, errno = payload % 2 ^ 19, math.floor(payload / 2 ^ 19)
        packet.kind = "done"
        packet.chunk, packet.errno = id, errno
        packet.request = connection.requests[id]
        connection.requests[id] = nil
        packet.line = string.format("done, chunk %d, %s", id, errno_text(errno))
        if kind == 2 then packet.line = packet.line .. ", key invalidated" end
        if packet.total and packet.total >= 8 and packet.op == SEND and le16(whole, 0) == 4 then
            packet.new_key = true
            packet.line = string.format("%s, new key 0x%08x", packet.line, le32(whole, 4))
        end
        if packet.request then
            packet.request.answer = packet.number
            packet.line = string.format("%s, for the request in packet %d", packet.line,
                packet.request.number)
            if packet.op == WRITE and packet.total and packet.total > 0 and errno == 0
                and rnbd_answer(packet) then
                packet.line = packet.line .. ": " .. packet.rnbd_line
            elseif packet.request.rnbd_line then
                packet.line = packet.line .. ": " .. packet.request.rnbd_line
            end
        end
    else
        packet.kind, packet.line = "unknown", string.format("unknown immediate 0x%08x", imm)
    end
end

-- Keeps of what was put together the messages alone, without the data before them.
local function shorten(packet)
    local whole, from = packet.whole, nil
    if packet.header then
        from = packet.header.at - packet.header.usr_len
        packet.header.at = packet.header.usr_len
        if packet.rnbd then packet.rnbd[1] = 0 end
    elseif packet.kind:find("^INFO_") or packet.new_key or packet.rnbd then
        from = 0
    end
    packet.whole = from and whole:sub(from + 1)
end

-- As bowline-wire prints an immediate. `cargo xtask dissect` compares the two.
local function imm_line(imm)
    local kind, payload = math.floor(imm / 2 ^ 28), imm % 2 ^ 28
    if kind == 0 then return string.format("request 0x%07x", payload) end
    if kind == 1 or kind == 2 then
        return string.format("done %d errno %d%s", payload % 2 ^ 19, math.floor(payload / 2 ^ 19),
            kind == 2 and " invalidated" or "")
    end
    if kind == 3 then return string.format("given up 0x%07x", payload) end
    if kind == 8 then return "heartbeat" end
    if kind == 9 then return "heartbeat ack" end
    return string.format("unknown immediate 0x%08x", imm)
end

local function show_desc(tree, tvb)
    show(rtrs, tree, tvb, RTRS_DESC, true)
end

local function show_rtrs(tvb, pinfo, root, packet)
    local tree = root:add(rtrs, tvb:range())
    tree:append_text(", " .. packet.line)
    tree:add(fields["rtrs.summary"], packet.line):set_generated()
    tree:add(fields["rtrs.kind"], packet.kind):set_generated()
    if packet.again then add_frame(tree, rtrs, "again", nil, packet.again) end
    if packet.first ~= packet.number and not packet.again then
        add_frame(tree, rtrs, "begins_in", nil, packet.first)
    end
    if packet.imm then
        local imm = ib.imm().range
        local item = tree:add(fields["rtrs.imm"], imm)
        item:add(fields["rtrs.imm.type"], imm, math.floor(packet.imm / 2 ^ 28))
        item:add(fields["rtrs.imm.names"], imm, imm_line(packet.imm))
        if packet.chunk then item:add(fields["rtrs.chunk"], imm, packet.chunk) end
        if packet.off then item:add(fields["rtrs.off"], imm, packet.off) end
        if packet.errno then item:add(fields["rtrs.done.errno"], imm, packet.errno) end
        if packet.kind == "given up" then
            item:add(fields["rtrs.given_up"], imm, packet.imm % 2 ^ 28)
        end
    end
    -- Messages that came in several packets get bytes of their own.
    local bytes = tvb
    if packet.whole and #packet.whole < tvb:len() then
        bytes = tvb:range(tvb:len() - #packet.whole):tvb()
    elseif packet.whole and #packet.whole > tvb:len() then
        bytes = ByteArray.new(packet.whole, true):tvb("RTRS message")
    end
    if packet.kind == "INFO_REQ" then
        show(rtrs, tree, bytes, RTRS_INFO_REQ, true)
        for at = 272, bytes:len() - 4, 4 do
            tree:add_le(fields["rtrs.given_up"], bytes:range(at, 4))
        end
    elseif packet.kind == "INFO_RSP" then
        show(rtrs, tree, bytes, RTRS_INFO_RSP, true)
        for at = 8, bytes:len() - 16, 16 do
            show_desc(tree:add(rtrs, bytes:range(at, 16), "Descriptor"), bytes:range(at, 16):tvb())
        end
    elseif packet.new_key then
        show(rtrs, tree, bytes, RTRS_RKEY_RSP, true)
    end
    local header = packet.header
    if header then
        local range = bytes:range(header.at, header.len)
        local item = tree:add(rtrs, range, header.kind .. " header")
        show(rtrs, item, range:tvb(), header.kind == "WRITE" and RTRS_WRITE or RTRS_READ, true)
        if header.sg_cnt == 1 then show_desc(item, bytes:range(header.at + 8, 16):tvb()) end
        tree:add(fields["rtrs.data_len"], packet.data_len):set_generated()
    end
    if packet.request then
        add_frame(tree, rtrs, "request_in", nil, packet.request.number)
        if packet.kind == "done" then
            tree:add(fields["rtrs.time"], packet.time - packet.request.time):set_generated()
        end
    end
    if packet.answer then add_frame(tree, rtrs, "answer_in", nil, packet.answer) end
    if packet.rnbd then
        show_rnbd(bytes:range(packet.rnbd[1], packet.rnbd[2]):tvb(), root, packet)
    end
    local name = packet.rnbd and "RNBD" or "RTRS"
    say(pinfo, name, (packet.again and "again: " or "") .. packet.line)
end

local function rtrs_packet(payload, pinfo, root)
    local tvb = unpadded(payload)
    local packet = packet_of(tvb, pinfo, function(code, piece)
        return guess_rtrs(code, piece, ib.imm() and be32(ib.imm().range:raw(), 0))
    end)
    if not packet or packet.connection.proto ~= "rtrs" then return false end
    if not packet.learnt then
        packet.learnt = true
        rtrs_learn(packet)
        shorten(packet)
    end
    show_rtrs(tvb, pinfo, root, packet)
    return true
end

--------------------------------------------------------------------------------------------------

local function all_of(proto)
    local out, prefix = {}, proto.name:lower() .. "."
    for filter, item in pairs(fields) do
        if filter:sub(1, #prefix) == prefix then out[#out + 1] = item end
    end
    return out
end
rds.fields = all_of(rds)
rtrs.fields = all_of(rtrs)
rnbd.fields = all_of(rnbd)

DissectorTable.get("tcp.port"):add(RDS_TCP_PORT, rds)
rds:register_heuristic("infiniband.payload", rds_packet)
rds:register_heuristic("infiniband.mad.cm.private", rds_cm)
rtrs:register_heuristic("infiniband.payload", rtrs_packet)
rtrs:register_heuristic("infiniband.mad.cm.private", rtrs_cm)
