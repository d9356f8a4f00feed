// A Java program that calls the C library for its sockets, as JNA has it: ADDRESS
import com.sun.jna.Library;
import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.net.InetAddress;

public class Rds {
    public interface C extends Library {
        int socket(int domain, int type, int protocol);
        int bind(int fd, Memory name, int len);
        long sendto(int fd, Pointer from, long len, int flags, Memory name, int nameLen);
        long recv(int fd, Memory to, long len, int flags);
        long write(int fd, Memory from, long len);
        int close(int fd);
    }

    static Memory name(String address, int port) throws Exception {
        Memory name = new Memory(16);
        name.clear();
        name.setShort(0, (short) 2);
        name.setByte(2, (byte) (port >> 8));
        name.setByte(3, (byte) port);
        name.write(4, InetAddress.getByName(address).getAddress(), 0, 4);
        return name;
    }

    static void must(boolean what, String text) {
        if (!what) {
            System.out.println(text + ": " + Native.getLastError());
            System.exit(1);
        }
    }

    public static void main(String[] args) throws Exception {
        C c = Native.load("c", C.class);
        int a = c.socket(21, 5, 0), b = c.socket(21, 5, 0);
        must(a >= 0 && b >= 0, "socket");
        must(c.bind(a, name(args[0], 4600), 16) == 0, "bind");
        must(c.bind(b, name(args[0], 4601), 16) == 0, "bind");
        Memory to = name(args[0], 4601), out = new Memory(4);
        Thread sender = new Thread(() -> {
            for (int n = 0; n < 2000; n++) {
                out.setInt(0, n);
                must(c.sendto(a, out, 4, 0, to, 16) == 4, "sendto");
            }
        });
        sender.start();
        Memory in = new Memory(16);
        for (int n = 0; n < 2000; n++) {
            must(c.recv(b, in, 16, 0) == 4, "recv");
            must(in.getInt(0) == n, "order");
        }
        sender.join();
        // The machine handles faults, but not those of the library.
        must(c.sendto(a, new Pointer(8192), 4, 0, to, 16) == -1 && Native.getLastError() == 14, "nowhere");
        must(c.write(a, out, 4) == -1 && Native.getLastError() == 95, "write");
        must(c.close(a) == 0 && c.close(b) == 0, "close");
    }
}
